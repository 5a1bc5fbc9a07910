"""Contests with peers: other people's MoE layers on the same inputs, in turns with ours."""
