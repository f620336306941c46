"""Floor 8: other libraries' module paths and names over our rooms."""
