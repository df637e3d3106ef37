"""The `zerolite` command: starts and ends the processes of a training job on one host or many."""
