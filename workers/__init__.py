"""All that talks to, runs, or stands beside a GPU worker."""
