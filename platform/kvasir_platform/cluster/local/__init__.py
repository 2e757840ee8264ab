"""One deployment on one machine: supervisor, child processes, runtime directory, clean-up."""
