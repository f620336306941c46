"""What an Accelerator knows: its processes, its settings, what it prepared, where it is in an accumulation window."""
