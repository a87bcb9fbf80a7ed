"""What the views take: the command, pages, the app."""
