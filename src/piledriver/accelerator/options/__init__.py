"""What a user can tell the Accelerator: handlers, plugins, and how arguments are resolved."""
