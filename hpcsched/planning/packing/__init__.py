"""Packing: trainings that share a device, and what that gains.

By Liu, Krishnan, Elmore and Franklin, "Understanding and Optimizing Packed Neural Network Training for
Hyper-Parameter Tuning" (2020), sections 3 to 5. Sections that modules here name are of this paper.

`costs` holds what was measured, `speeds` what a pack is predicted to take, `admission` what fits into memory,
`distance` how alike configurations are, `strategies` and `search` the ways to choose packs, `planner` puts
them together, `problem` reads it all from JSON.
"""
