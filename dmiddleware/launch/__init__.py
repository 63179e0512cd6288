"""ditask: starts the processes of a run, watches over them, and ends them."""
