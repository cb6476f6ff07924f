"""Let the ranks of a job find each other, talk and end together."""
