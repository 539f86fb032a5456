"""Products of two arrays that are both computed in the call: batched matrix products."""
