"""Packing: which trainings share a device, and what that gains (Liu et al. 2020, "Understanding and Optimizing
Packed Neural Network Training for Hyper-Parameter Tuning", sections 3 to 5).

`costs` holds what was measured, `speeds` what a pack is predicted to take, `admission` what fits into memory,
`distance` how alike configurations are, `strategies` and `search` the ways to choose packs, `planner` puts
them together, `problem` reads it all from JSON.
"""
