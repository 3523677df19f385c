"""Resources of this process: memory, threads, standard output."""
