"""The recorder: what a run did, in SQLite files under `RUN_DIR/record`, for people who look at it while it runs or later.

`files.py` has the tables. The trainer writes through `RunRecorder`, the gateway through `FleetRecorder`; both hand their work
to a thread (`background.py`). `docs/recorder.md` describes the format."""
