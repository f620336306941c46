"""Floor 6: other libraries' module paths and names over our rooms. No behaviour of its own."""
