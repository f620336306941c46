"""Attention: the layer, masks, rotary and ALiBi positions, KV cache."""
