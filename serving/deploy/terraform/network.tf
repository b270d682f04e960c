# Clients -> 443 and 80 of the load balancer -> 8000 and 50051 of the servers. Nothing else gets in.

resource "aws_security_group" "balancer" {
  name_prefix = "${var.name}-balancer-"
  description = "Load balancer of ${var.name}"
  vpc_id      = var.vpc_id
  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "server" {
  name_prefix = "${var.name}-server-"
  description = "Servers of ${var.name}"
  vpc_id      = var.vpc_id
  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each = {
    for pair in setproduct(var.allowed_cidrs, [80, 443]) : "${pair[0]}:${pair[1]}" => pair
  }
  security_group_id = aws_security_group.balancer.id
  cidr_ipv4         = each.value[0]
  from_port         = each.value[1]
  to_port           = each.value[1]
  ip_protocol       = "tcp"
}

resource "aws_vpc_security_group_egress_rule" "to_servers" {
  for_each                     = local.ports
  security_group_id            = aws_security_group.balancer.id
  referenced_security_group_id = aws_security_group.server.id
  from_port                    = each.value
  to_port                      = each.value
  ip_protocol                  = "tcp"
}

resource "aws_vpc_security_group_ingress_rule" "from_balancer" {
  for_each                     = local.ports
  security_group_id            = aws_security_group.server.id
  referenced_security_group_id = aws_security_group.balancer.id
  from_port                    = each.value
  to_port                      = each.value
  ip_protocol                  = "tcp"
}

# Models, images, secrets, logs and metrics: all HTTPS.
resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.server.id
  cidr_ipv4         = "0.0.0.0/0"
  from_port         = 443
  to_port           = 443
  ip_protocol       = "tcp"
}
