"""AdamW: torch's fused one, one with 8-bit or bf16 moments (`compact`), one with split master weights."""
