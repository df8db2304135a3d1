"""Has whole jobs under virtual time, on machines that come and go: what a job would cost, and when it would end."""
