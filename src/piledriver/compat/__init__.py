"""Floor 7: other libraries' module paths and names over our rooms."""
