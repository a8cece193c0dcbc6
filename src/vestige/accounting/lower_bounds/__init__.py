"""Lower bounds on epsilon, rates and areas with their confidence: from scores alone, of any library."""
