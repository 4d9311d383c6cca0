"""Commands about the machine: `doctor`, `script`, `settings`."""
