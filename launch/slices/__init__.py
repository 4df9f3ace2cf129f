"""TPU slices and GPU nodes: what they consist of, and how programs are started on them."""
