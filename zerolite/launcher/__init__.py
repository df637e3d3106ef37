"""The `zerolite` command: starts the processes of a training job on this machine."""
