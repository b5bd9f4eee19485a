"""Reports, figures, comparisons and significance tests for the folders of finished runs."""
