"""What runs have in common whatever they compute: meshes, programs, checkpoints, processes, the command line."""
