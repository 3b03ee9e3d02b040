"""What `kvstore bench breakeven` is made of: prefill, loads, the comparison, its picture."""
