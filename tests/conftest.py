import os

# Before JAX starts: two devices, so that tensor parallelism can be tested on any machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
