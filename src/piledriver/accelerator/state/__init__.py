"""State of an Accelerator: processes, settings, prepared objects, accumulation window."""
