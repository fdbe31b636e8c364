"""Jobs by HTTP: submitted, steered, fed, read and tried again."""
