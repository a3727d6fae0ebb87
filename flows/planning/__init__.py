"""`millrace plan` and the deployment `plan`: a request becomes a plan, and a plan tables and a chart."""
