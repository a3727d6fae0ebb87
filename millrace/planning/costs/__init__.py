"""What the parts of a campaign cost on given hardware, by formulas and tables: no GPU, only shapes and rates."""
