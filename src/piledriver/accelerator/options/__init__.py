"""Options of the Accelerator: handlers, plugins, and the resolution of arguments."""
