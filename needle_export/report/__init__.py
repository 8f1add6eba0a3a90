"""What a build knows about what it made: one frozen report, its JSON, and its views for people."""
