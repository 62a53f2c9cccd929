"""What the platform is measured against, each as its own documentation recommends running it."""
