"""What can be measured where there is one idle GPU, by one command, part by part (benchmarks/gpu-day.md)."""
