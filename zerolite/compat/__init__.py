"""DeepSpeed's Python interface, and the importer of its checkpoints."""
