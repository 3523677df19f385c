"""What a person looks at: figures of a plan, and the HTML report of a run."""
