"""Prepares training data: reads, renders, encodes and packs documents."""
