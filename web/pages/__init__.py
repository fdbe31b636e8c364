"""The pages for people: rendered here, whole without JavaScript, and kept fresh with it."""
