"""Commands about the jobs of a run: control, status, history, output, reasons."""
