"""Recurrent layers: LSTM, GRU and RNN, step by step. Imports `simd`."""
