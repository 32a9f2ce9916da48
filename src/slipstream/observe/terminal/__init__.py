"""Runs and fleets on a terminal: `slipstream top`, `status`, `logs` and `runs`. `run_files.py` reads a run directory, also
while the run writes to it; `fleet_table.py`, `run_view.py` and `run_list.py` draw; `screen.py` keeps a drawing up to date."""
