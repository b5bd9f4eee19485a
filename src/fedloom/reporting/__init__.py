"""What is made of the folders of finished runs: reports, figures, comparisons, tests of significance."""
