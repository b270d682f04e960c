resource "aws_lb" "this" {
  name                       = var.name
  load_balancer_type         = "application"
  security_groups            = [aws_security_group.balancer.id]
  subnets                    = var.public_subnet_ids
  drop_invalid_header_fields = true
  idle_timeout               = 600 # a stream may be silent while its request waits for a slot
}

resource "aws_lb_target_group" "http" {
  name                 = "${var.name}-http"
  vpc_id               = var.vpc_id
  target_type          = "ip"
  protocol             = "HTTP"
  port                 = local.ports.http
  deregistration_delay = local.drain_seconds
  health_check {
    path                = "/health"
    matcher             = "200"
    interval            = 15
    timeout             = 5
    healthy_threshold   = 2
    unhealthy_threshold = 3
  }
}

resource "aws_lb_target_group" "grpc" {
  name                 = "${var.name}-grpc"
  vpc_id               = var.vpc_id
  target_type          = "ip"
  protocol             = "HTTP"
  protocol_version     = "GRPC"
  port                 = local.ports.grpc
  deregistration_delay = local.drain_seconds
  health_check {
    path                = "/grpc.health.v1.Health/Check"
    matcher             = "0"
    interval            = 15
    timeout             = 5
    healthy_threshold   = 2
    unhealthy_threshold = 3
  }
}

resource "aws_lb_listener" "redirect" {
  load_balancer_arn = aws_lb.this.arn
  protocol          = "HTTP"
  port              = 80
  default_action {
    type = "redirect"
    redirect {
      protocol    = "HTTPS"
      port        = "443"
      status_code = "HTTP_301"
    }
  }
}

resource "aws_lb_listener" "tls" {
  load_balancer_arn = aws_lb.this.arn
  protocol          = "HTTPS"
  port              = 443
  ssl_policy        = "ELBSecurityPolicy-TLS13-1-2-2021-06"
  certificate_arn   = var.certificate_arn
  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.http.arn
  }
}

# Metrics need no API key: they are for the collector inside, not for the world.
resource "aws_lb_listener_rule" "hide_metrics" {
  listener_arn = aws_lb_listener.tls.arn
  priority     = 10
  action {
    type = "fixed-response"
    fixed_response {
      status_code  = "404"
      content_type = "text/plain"
      message_body = "not found"
    }
  }
  condition {
    path_pattern {
      values = ["/metrics", "/metrics/*"]
    }
  }
}

resource "aws_lb_listener_rule" "grpc" {
  listener_arn = aws_lb_listener.tls.arn
  priority     = 20
  action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.grpc.arn
  }
  condition {
    path_pattern {
      values = ["/jspec.v1.Jspec/*", "/grpc.health.v1.Health/*", "/grpc.reflection.*"]
    }
  }
}
