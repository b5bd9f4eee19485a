"""What a client measures, and what is made of it: summaries, descriptor analysis, report, comparison."""
