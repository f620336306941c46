"""Linear layers in fp8."""
