"""Ray with more patience. It gives a node half a minute to start, which is too short beside other tests on a small machine.

`python -m tests.deploy.patient_ray start …` is `ray start …`."""

import time
from typing import Any

from ray._private import services

START_SECONDS = 180.0


def be_patient() -> None:
    """Let a node take minutes to start, in this process."""
    get_node = services.get_node

    def get_patiently(*arguments: Any) -> Any:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    services.get_node = get_patiently


if __name__ == "__main__":
    from ray.scripts.scripts import main

    be_patient()
    main()
