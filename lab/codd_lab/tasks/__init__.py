"""What is asked, how it is answered, and what counts as right."""
