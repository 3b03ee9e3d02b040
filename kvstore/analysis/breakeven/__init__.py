"""Parts of `kvstore bench breakeven`: prefill, loads, the comparison, its plot."""
