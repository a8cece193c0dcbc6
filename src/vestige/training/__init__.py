"""Training one model: `vestige.train`, its plan, its folder, its guarantee and its result."""
