"""Training one model: `vestige.train`, its plan, its folder, and what may be said of it."""
