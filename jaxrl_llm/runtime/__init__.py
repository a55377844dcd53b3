"""Infrastructure of every run: device meshes, compiled programs, checkpoints, hosts and the command line."""
