"""`penstock doctor`: everything that a job needs, tried before it runs."""
