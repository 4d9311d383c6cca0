"""Results as tables, charts and pages."""
