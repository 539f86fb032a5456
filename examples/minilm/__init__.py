"""all-MiniLM-L6-v2, a trained encoder of sentences, shared by the programs of this folder."""
